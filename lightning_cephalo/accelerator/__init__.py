"""The one room that knows devices: real and emulated."""
