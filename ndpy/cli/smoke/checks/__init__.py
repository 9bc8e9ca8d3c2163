"""The checks, group by group; importing a module registers its checks."""
