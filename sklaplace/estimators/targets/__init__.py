"""Targets: conversion of ``y`` to tensors and back."""
