"""Config files of runs and of sweeps. `default` has every field of a run."""
