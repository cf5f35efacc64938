//! What every engine must do alike.
#![allow(dead_code)]

use half::{bf16, f16};
use kiln_group::{Buffer, Call, Config, Counter, Error, Group, Op, Reduce};
use kiln_ir::DType;
use std::time::Duration;

pub const DTYPES: [DType; 8] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8, DType::Bool];

/// Tests wait 5 s for a rank, not 60.
pub fn config(shards: usize) -> Config {
    Config { deadline: Duration::from_secs(5), shards: Some(shards), threads: 1, flight: None, rate: None }
}

/// Runs `f` on a thread for each rank and gives the results in order.
pub fn each<T: Send>(groups: Vec<Group>, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || f(group))).collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

/// Values of a shard, whose sum depends on the order.
pub fn value(shard: usize, dtype: DType, n: usize, salt: usize) -> Vec<u8> {
    let x = |i: usize| {
        let h = (shard * 7919 + i * 104729 + salt * 31) % 1013;
        (h as f64 - 500.0) * 10f64.powi((shard * 5 + i) as i32 % 5 - 2)
    };
    let each = |f: &dyn Fn(f64) -> Vec<u8>| (0..n).flat_map(|i| f(x(i))).collect();
    match dtype {
        DType::F64 => each(&|x| x.to_le_bytes().to_vec()),
        DType::F32 => each(&|x| (x as f32).to_le_bytes().to_vec()),
        DType::F16 => each(&|x| f16::from_f64(x / 300.0).to_le_bytes().to_vec()),
        DType::BF16 => each(&|x| bf16::from_f64(x).to_le_bytes().to_vec()),
        DType::I64 => each(&|x| (x as i64).wrapping_mul(1 << 40).to_le_bytes().to_vec()),
        DType::I32 => each(&|x| (x as i32).to_le_bytes().to_vec()),
        DType::U8 => each(&|x| vec![x as i64 as u8]),
        DType::Bool => each(&|x| vec![(x > 0.0) as u8]),
        other => panic!("no values of {other}"),
    }
}

/// The contribution of a rank.
pub fn contribution(group: &Group, reduce: Reduce, dtype: DType, n: usize, salt: usize) -> Buffer {
    let mut counter = Counter::new(group, reduce, dtype, dtype.bytes(n)).unwrap();
    for shard in group.layout().held(group.rank()) {
        counter.push(&value(shard, dtype, n, salt));
    }
    counter.finish().unwrap()
}

/// Every collective on every dtype and many sizes. The digest is the same for any engine and any number of ranks.
pub fn digest(group: &Group) -> Result<u64, Error> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ byte as u64).wrapping_mul(0x100_0000_01b3);
        }
    };
    let layout = group.layout();
    for dtype in DTYPES {
        for n in [0, 1, 7, 64, 1000, 40_000] {
            for reduce in Reduce::ALL {
                if reduce.fits(dtype).is_err() {
                    continue;
                }
                let whole =
                    group.all_reduce(reduce, dtype, contribution(group, reduce, dtype, n, 1))?.wait()?;
                add(&whole);
                assert_eq!(*cut(group, reduce, dtype, n)?, *whole, "{dtype} {n} {reduce:?} in ranges");
                let scattered =
                    group.reduce_scatter(reduce, dtype, contribution(group, reduce, dtype, n, 1))?.wait()?;
                let piece = layout.piece(group.rank(), n);
                let piece = dtype.bytes(piece.start)..dtype.bytes(piece.end);
                assert_eq!(scattered[piece.clone()], whole[piece], "{dtype} {n} {reduce:?}");
            }
            let full = value(99, dtype, n, 2);
            let mut own = group.buffer_of(&vec![0; full.len()])?;
            let piece = layout.piece(group.rank(), n);
            let piece = dtype.bytes(piece.start)..dtype.bytes(piece.end);
            own[piece.clone()].copy_from_slice(&full[piece]);
            let gathered = group.all_gather(dtype, own)?.wait()?;
            assert_eq!(*gathered, *full, "{dtype} {n}");
            let root = (n + 1) % group.ranks();
            let content = if group.rank() == root { full.clone() } else { vec![0; full.len()] };
            let copy = group.run(Call::new(Op::Broadcast(root as u32), dtype), group.buffer_of(&content)?)?;
            assert_eq!(*copy, *full, "{dtype} {n}");
        }
        group.barrier()?;
    }
    Ok(hash)
}

/// The same sum in ranges, each given as soon as it is there.
fn cut(group: &Group, reduce: Reduce, dtype: DType, n: usize) -> Result<Buffer, Error> {
    let own = contribution(group, reduce, dtype, n, 1);
    let ends = [n / 7, n / 7, n / 2, n - n / 9, n].map(|at| dtype.bytes(at));
    let call = Call::new(Op::AllReduce(reduce), dtype);
    let (mut promise, pending) = group.promise_cut(call, dtype.bytes(n), &ends[..4])?;
    let mut start = 0;
    for end in ends {
        for part in 0..promise.parts() {
            promise.put(part, start, &own.part(part)[start..end])?;
        }
        promise.reach(end)?;
        start = end;
    }
    promise.give()?;
    pending.wait()
}

/// What the digest of 8 shards must be, by one rank alone.
pub fn expected() -> u64 {
    let alone = Group::local(1, config(8)).unwrap().remove(0);
    digest(&alone).unwrap()
}
