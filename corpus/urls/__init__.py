"""URLs: parsing and canonical form, rules, domain blocklists, hosts, public suffixes."""
