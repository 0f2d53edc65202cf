"""URLs: parsing and canonical form (rules), the bulk path for lists, domain blocklists, hosts, public suffixes."""
