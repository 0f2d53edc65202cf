"""Convert checkpoints: `python -m convert.merge_mp` merges any layout into one Hugging Face folder."""
