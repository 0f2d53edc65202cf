"""What every step shares: settings, errors, shard files, statistics, progress and the GPT-2 tokenizer.

Nothing here knows about a particular step; everything else in the house may import it.
"""
