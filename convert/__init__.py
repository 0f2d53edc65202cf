"""Checkpoints between layouts: `python -m convert.merge_mp` makes one Hugging Face folder out of any of our runs."""
