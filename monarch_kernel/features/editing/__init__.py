"""Edited code reaches what lives: classes and functions are changed in place, modules are loaded anew."""
