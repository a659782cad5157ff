"""Faults for a store under test: a library that breaks its files, images of a power loss, and all kinds of damage."""
