"""GPT-2 in Hugging Face format: configuration, tokenizer, weights, read and written."""
