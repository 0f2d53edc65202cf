"""GPT-2 in Hugging Face's format: `pretrained` reads folders, also as the start of a run. It alone imports torch."""
