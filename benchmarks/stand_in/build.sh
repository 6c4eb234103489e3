#!/bin/sh
# build.sh SITE_PACKAGES FOLDER: makes FOLDER/libcuda.so.1 of device.c, for the PyTorch in
# SITE_PACKAGES (a build for CUDA 13), whose packages have the headers. What PyTorch and Triton ask
# for and device.c does not have is a function that returns 0.
set -eu
site=$1 out=$2 here=$(dirname "$0")
mkdir -p "$out"
gcc -w -O1 -fPIC -I"$site/nvidia/cu13/include" -I"$site/triton/backends/nvidia/include" \
    -c "$here/device.c" -o "$out/device.o"
nm --defined-only "$out/device.o" | awk '$2 == "T" {print $3}' | sort > "$out/have"
{
  for library in "$site"/torch/lib/*.so*; do nm -D --undefined-only "$library" 2>/dev/null; done |
    awk '{print $2}' | sed 's/@.*//' | grep -E '^(__cuda|cuda|cublas|cu)[A-Z]' |
    grep -vE '^(cudnn|cuFile)'
  grep -ohE '\bcu[A-Z][A-Za-z0-9_]+' "$site/triton/backends/nvidia/driver.c" |
    grep -vE '(_t|Py.*)$|^cuuint'
  echo cuInit
} | sort -u > "$out/want"
comm -13 "$out/have" "$out/want" | grep -vE '_t$' |
  sed 's/.*/int &(void) { return 0; }/' > "$out/rest.c"
gcc -w -fPIC -c "$out/rest.c" -o "$out/rest.o"
gcc -shared -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" "$out/device.o" "$out/rest.o" -ldl
ln -sf libcuda.so.1 "$out/libcuda.so"
