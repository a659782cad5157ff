"""The adapter for Hugging Face transformers."""

from agentmem.adapters.transformers.adapter import TransformersAdapter
from agentmem.adapters.transformers.cache import BranchCache

__all__ = ["BranchCache", "TransformersAdapter"]
