"""Linears over weights that stay in their codes, and over codes on both sides."""
