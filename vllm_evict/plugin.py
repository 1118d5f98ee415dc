"""The functions of the package's entry points."""

from .integration.plugin import platform, register

__all__ = ["platform", "register"]
