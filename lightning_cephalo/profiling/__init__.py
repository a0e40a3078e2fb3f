"""Measures compute time, memory and network of every rank on the running job."""
