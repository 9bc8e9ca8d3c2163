"""The checks, by group. Importing a module registers its checks."""
