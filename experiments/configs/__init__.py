"""Config files. `default` has every field; the others change some of them."""
