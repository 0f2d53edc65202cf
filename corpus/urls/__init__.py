"""URLs: parsing and canonical form, the rules that refuse them, lists of them, public suffixes."""
