"""The study `latecomer study har`: centralised, synchronous and asynchronous learning compared.

R. Gajanin, A. Danilenka, A. Morichetta, S. Nastic. Towards Adaptive Asynchronous Federated
Learning for Human Activity Recognition. IoT 2024.
"""
