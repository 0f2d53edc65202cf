"""GPT-2 in Hugging Face's format. Only `pretrained`, which reads the weights, imports torch."""
