"""Config files: `default` holds every field; the others change some of them."""
