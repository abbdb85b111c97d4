"""How the reference model is made: tokenizer, curriculum, training, export. Not part of the package."""
