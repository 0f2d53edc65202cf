"""HTML to text: decoding, the extractors, and the worker processes that can be killed."""
