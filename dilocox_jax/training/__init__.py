"""One training run: builds its parts, trains, evaluates, saves and resumes."""
