"""The path of the checkout under test."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
