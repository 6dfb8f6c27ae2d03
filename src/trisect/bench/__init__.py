"""How fast a model of some shape is, beside what its FLOPs and bytes allow (docs/bench.md)."""
