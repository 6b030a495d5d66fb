"""The command line: ``radixkv serve | demo | stat | plan | doctor | model``. Nothing below imports it."""
