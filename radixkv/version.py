"""The one place the release number is written; packaging reads it from here."""

VERSION = "0.1.0"
