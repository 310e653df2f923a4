"""How fast weights are extracted or loaded, against the bandwidth of the links: what ``benchmarks/weights.py`` runs."""
