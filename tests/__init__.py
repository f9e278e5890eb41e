"""Tests, one folder and file for each of the package's."""
