"""The command line `ddtree` and what its commands do."""
