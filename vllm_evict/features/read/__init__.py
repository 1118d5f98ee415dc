"""Layers read a part of what a request has on the device."""
