"""HTML to text: character decoding, the extractors, and a pool of killable worker processes."""
