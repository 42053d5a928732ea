"""Maths that several methods share."""
