"""How the reference model is made. Not part of the package."""
