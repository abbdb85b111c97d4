"""Parts of the kernels that multiply few rows without tensor cores."""
