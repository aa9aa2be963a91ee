"""What tests of ctxreuse and of code on top of it share: fakes and the contracts that every part must keep."""
