"""One module a fuzzer: it draws operations at random and does them to a pair."""
