"""GPT-2 in Hugging Face's format: `pretrained` reads and writes folders, `finetune` starts a run from one.

Only `pretrained` imports torch.
"""
