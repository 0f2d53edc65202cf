"""Text in hand: repair, filters, language, words and their n-grams."""
