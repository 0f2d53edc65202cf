"""Work on single texts: repair, filters, language, words, n-grams and their removal."""
