"""GPT-2 in Hugging Face's format: `pretrained` reads folders, `finetune` starts a run from one.

Only `pretrained` imports torch.
"""
