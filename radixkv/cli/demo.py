"""``radixkv demo``: its flags; what it does is ``radixkv.demo``."""
