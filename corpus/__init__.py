"""From a list of URLs to a Megatron `.bin/.idx` dataset; each step is `python -m corpus.<step>`.

blacklist, scrape or ingest, clean, dedup, repeats, decontaminate, tokenize, merge_index
"""
