"""Device functions of the Hopper kernel: the rows of a work list, turned."""
