"""The corpus half: a list of URLs becomes a Megatron `.bin/.idx` dataset; each step is `python -m corpus.<step>`.

blacklist -> scrape -> clean -> dedup -> tokenize -> merge_index; `index` is the file format they end in.
"""
