"""What ``radixkv doctor`` looks at, one file a subject. A check reads this machine and changes nothing on it."""
