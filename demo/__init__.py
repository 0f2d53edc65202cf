"""The offline demo: a small web site made from text every Python carries, and the loopback server it is scraped from.

Nothing else in the house knows the site; a folder of other pages in the same form (`demo.site`) gives another corpus.
"""
