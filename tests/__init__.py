"""Tests in the folders mirror the package; those at the top of this folder concern all of it."""
