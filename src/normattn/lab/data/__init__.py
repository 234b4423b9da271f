"""Corpora, tokenisers, tokens, training batches and the length-controlled evaluation sets."""
