-- What all scripts begin with.
--
-- KEYS[1] is the run's hash, KEYS[1 + i] the stream of the i-th key. Fields of the hash: "#n" is the
-- counter, "#e" where it began, which tells a hash from a later one, "=<key>" is
-- "<number>-<tag> <value>", "!<key>" marks a key with a waiter. The tag is the write's stamp, in
-- decimal. "<number>-<tag>" is also the write's id in the stream: numbers only grow, because the
-- counter starts at the server's time in microseconds. A stream only passes a value to waiters: it
-- expires by itself.
local hash = KEYS[1]

local function next_number()
  local number = redis.pcall('HINCRBY', hash, '#n', 1)
  local refused = type(number) == 'table' and number.err
  local odd = refused and (string.find(refused, 'not an integer') or string.find(refused, 'overflow'))
  if odd or not refused and (number < 1 or number > 9007199254740000) then
    -- It is no counter of this package: begin as in a new hash.
    redis.call('HDEL', hash, '#n')
    refused = true
  end
  -- Raises what else was refused, such as for lack of memory.
  if refused then number = redis.call('HINCRBY', hash, '#n', 1) end
  if number == 1 then
    redis.call('PERSIST', hash)
    local now = redis.call('TIME')
    number = redis.call('HINCRBY', hash, '#n', string.format('%.0f', now[1] * 1000000 + now[2]))
    redis.call('HSET', hash, '#e', string.format('%.0f', number))
  end
  return string.format('%.0f', number)
end

-- Tell waiters of a write, or of a delete.
local function publish(stream, id, field, value)
  local sent = redis.pcall('XADD', stream, 'MAXLEN', '1', id, field, value)
  if type(sent) == 'table' and sent.err then
    -- The stream outlived its run, or the server's clock went back: create it again.
    redis.call('DEL', stream)
    redis.call('XADD', stream, 'MAXLEN', '1', id, field, value)
  end
  redis.call('EXPIRE', stream, 60)
end

-- Write a value; its id.
local function write(stream, key, tag, value)
  local id = next_number() .. '-' .. tag
  redis.call('HSET', hash, '=' .. key, id .. ' ' .. value)
  if redis.call('HEXISTS', hash, '!' .. key) == 1 then publish(stream, id, 'v', value) end
  return id
end

local function is_64_bit(digits)
  if #digits > 1 and string.sub(digits, 1, 1) == '0' then return false end
  return #digits < 20 or (#digits == 20 and digits <= '18446744073709551615')
end

-- What is stored, its id and its tag; of an absent key false and "".
local function read(key)
  local stored = redis.call('HGET', hash, '=' .. key)
  if not stored then return false, '', '' end
  local id, number, tag = string.match(stored, '^((%d+)%-(%d+)) ')
  -- What this package did not write counts as absent.
  if not id or not is_64_bit(number) or not is_64_bit(tag) then return false, '', '' end
  return stored, id, tag
end

