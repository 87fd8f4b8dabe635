"""What every figure of the comparison means, in words; shown by --help. Text only."""

EXPLANATION = """\
what the figures mean
  TTFT            request sent -> first event with non-empty text (a role or an empty chunk is none)
  TPOT            (last - first) / (output tokens - 1): first text to last text or finish, tokens counted by usage;
                  left out where a whole answer came in one chunk
  end to end      request sent -> end of the stream
  tokens/s        of all requests: tokens of answered requests / (first sent -> last ended), summed over rounds;
                  of one request: output tokens / end to end
  p50, p95        linear interpolation between the nearest ranks (numpy's default)
  peak memory     highest of each process during the measured requests (resident on the CPU: memory that prefill and
                  decode share counts in both); in all = sum of the processes' peaks. Of several instances of a
                  role the sum is shown, as of threads and KV blocks
  peak KV blocks  most blocks held by requests at once, in each process
  prefix hit rate cached prompt tokens / prompt tokens, as the side that computes the prompt counts them
  KV moved        bytes copied from prefill to decode, the time of it, and the share of that time during which the
                  prefill was still computing
  median ...      the engine's own phases: queue = admitted -> scheduled, prefill = scheduled -> first token,
                  decode wait = first token -> first decode step
  send late       how long a request that was due waited inside this client
  split - merged  difference of the figure over the prompts answered in both modes, with a 95 % bootstrap interval;
                  "no clear difference" when the interval contains 0

Errors, aborts and timeouts are counted and are part of no figure. An answer whose X-Cache-Mode is not the mode asked
for ends the run: a silent fallback is never compared.

exit code: 0 all answered, 1 some request or mode failed, 2 nothing could be compared, 3 answered in another mode

examples
  kvgate compare
  kvgate compare --prompt-tokens 4096 --output-tokens 128 --requests 16 --concurrency 4 --rounds 4
  kvgate compare --cache warm --json result.json
  KVGATE_KEY=sk-... kvgate compare --url http://127.0.0.1:9000 --csv rows.csv --prompt-file prompt.txt
"""
